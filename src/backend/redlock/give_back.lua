-- Undoes a take, the nth request of its owner. Who goes on waiting has a place from here on; who leaves for
-- good has none any more. given_up: the number of the last request of ours that this node may still have to get,
-- if there is one: it must find that we do not want it any more.
local owner, n, given_up, waits, since, waited, ttl, who = unpack(ARGV)
local makes_way = first() == owner
if redis.call('GET', lock) == owner then
  local by, latest = (ask('GET', taken) or ''):match('^(%S+) (%d+)$')
  -- We have taken it again since, and may hold it: this comes too late.
  if by == owner and tonumber(latest) > tonumber(n) then return { 'done' } end
  let_go(owner)
  ask('DEL', turns .. owner)
  makes_way = true
end
if waits == '1' then wait(owner, since, waited, ttl, who) else forget(owner) end
if makes_way then tell_first(owner) end
if given_up ~= '' then redis.call('SET', notes .. owner, 'withdrawn ' .. given_up, 'PX', 600000) end
return { 'done' }
