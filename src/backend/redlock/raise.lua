-- Second phase: raises the counter to the token that was agreed on, if the node is still ours.
local owner, token, ttl, who = unpack(ARGV)
if redis.call('GET', lock) ~= owner then
  return { 'gone' }
end
if highest_token() < tonumber(token) then
  redis.call('SET', counter, token)
end
ask('ZREM', places, owner)
describe(owner, ttl, token, who)
sweep(owner)
return { 'ours' }
