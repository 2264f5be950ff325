-- Undoes a take. When we leave for good we stop waiting too. given_up: the number of the last request of
-- ours that this node may still have to get, if there is one: it must find that we do not want it any more.
local owner, for_good, given_up = unpack(ARGV)
if redis.call('GET', lock) == owner then let_go(owner) end
if for_good == '1' then
  ask('ZREM', places, owner)
  ask('HDEL', details, owner)
end
if given_up ~= '' then redis.call('SET', notes .. owner, 'withdrawn ' .. given_up, 'PX', 600000) end
return { 'done' }
