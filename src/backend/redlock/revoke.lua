-- Takes this node away from one holder: marks it, or frees it on the spot.
local owner, token, how, reason = unpack(ARGV)
local known = ask('HGET', details, owner)
if redis.call('GET', lock) ~= owner or (token ~= '' and known and known:match('^%S+ %S+ %S+ (%S+)') ~= token) then
  return { 'gone' }
end
if how == 'now' then
  let_go(owner)
  tell_first()
  return { 'ours' }
end
if not known then return { 'foreign' } end
redis.call('SET', notes .. owner, 'revoked ' .. reason, 'PX', math.max(redis.call('PTTL', lock), 1))
return { 'ours' }
