-- Takes this node away from one holder: marks it, or frees it on the spot; then `run` is what becomes of its run, and
-- the reason is kept for so long (ms).
local owner, token, how, reason, run, keep = unpack(ARGV)
local known = ask('HGET', details, owner)
if redis.call('GET', lock) ~= owner or (token ~= '' and known and known:match('^%S+ %S+ %S+ (%S+)') ~= token) then
  return { 'gone' }
end
if how == 'now' then
  local runs = ask('GET', lingering) ~= owner
  let_go(owner)
  redis.pcall('SET', notes .. owner, 'taken ' .. reason, 'PX', keep)
  if runs then redis.pcall('SET', last, run) end
  tell_first()
  return { 'ours' }
end
if not known then return { 'foreign' } end
redis.call('SET', notes .. owner, 'revoked ' .. reason, 'PX', math.max(redis.call('PTTL', lock), 1))
return { 'ours' }
