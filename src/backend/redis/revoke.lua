-- Takes the lock away from one holder: marks it, or frees it on the spot.
local owner, token, how, reason = unpack(ARGV)
local value = settle()
if not holds(value, owner) or (token ~= '' and detail(owner, 4) ~= token) then
  return 'free'
end
if how == 'now' then
  let_go(value, owner)
  wake()
  return 'freed'
end
local ends = redis.call('ZSCORE', holders, owner)
if not ends then return 'foreign' end
redis.call('SET', notes .. owner, 'revoked ' .. reason, 'PX', string.format('%.0f', math.max(ends - now, 1)))
return 'marked'
