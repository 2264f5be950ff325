-- Moves the end of what a release has left behind on this node: to ttl from now or, with zero, to now.
local owner, ttl = unpack(ARGV)
if redis.call('GET', lock) ~= owner then
  local why = reason_in(ask('GET', notes .. owner), 'taken')
  if why then return { 'taken', why } end
  return { 'gone' }
end
if redis.call('GET', lingering) ~= owner then return { 'running' } end
if tonumber(ttl) == 0 then
  let_go(owner)
  tell_first()
  return { 'done' }
end
local why = reason_in(ask('GET', notes .. owner), 'revoked')
if why then return { 'revoked', why } end
extend(ttl)
local known = ask('HGET', details, owner)
if known then ask('HSET', details, owner, (known:gsub('^(%S+) %S+', '%1 ' .. ttl, 1))) end
return { 'done' }
