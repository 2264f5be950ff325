-- Takes the lock away from one holder: marks it, or frees it on the spot; then `run` is what becomes of its run, and
-- the reason is kept for so long (ms).
local owner, token, how, reason, run, keep = unpack(ARGV)
local value = settle()
if not holds(value, owner) or (token ~= '' and detail(owner, 4) ~= token) then
  return { 'gone' }
end
if how == 'now' then
  local runs = redis.call('SISMEMBER', lingering, owner) == 0
  let_go(value, owner)
  redis.pcall('SET', notes .. owner, 'taken ' .. reason, 'PX', keep)
  if runs then redis.pcall('SET', last, run) end
  wake()
  return { 'freed' }
end
local ends = redis.call('ZSCORE', holders, owner)
if not ends then return { 'foreign' } end
redis.call('SET', notes .. owner, 'revoked ' .. reason, 'PX', string.format('%.0f', math.max(ends - now, 1)))
return { 'marked' }
