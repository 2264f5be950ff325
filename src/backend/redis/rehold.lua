-- Moves the end of what a release has left behind: to ttl from now or, with zero, to now.
local owner, ttl = unpack(ARGV)
local value = settle()
if not holds(value, owner) then
  local why = reason_in(ask('GET', notes .. owner), 'taken')
  if why then return { 'taken', why } end
  return { 'gone' }
end
if redis.call('SISMEMBER', lingering, owner) == 0 then return { 'running' } end
if tonumber(ttl) == 0 then
  let_go(value, owner)
  redis.pcall('SET', notes .. owner, 'released', 'PX', 60000)
  wake()
  return { 'done' }
end
local why = reason_in(ask('GET', notes .. owner), 'revoked')
if why then return { 'revoked', why } end
extend(value, owner, ttl)
local known = ask('HGET', details, owner)
if known then redis.call('HSET', details, owner, (known:gsub('^(%S+) %S+', '%1 ' .. ttl, 1))) end
tell_first()
return { 'done' }
