-- Moves the end of what a release has left behind, on a single Redis or on one node: to ttl from now or, with zero, to now.
local owner, ttl = unpack(ARGV)
settle()
if not holds(owner) then return told(owner, 'taken') or { 'gone' } end
if not lingers(owner) then return { 'running' } end
if tonumber(ttl) == 0 then
  let_go(owner)
  leave_note(owner, 'released', 60000)
  wake()
  return { 'done' }
end
local revoked = told(owner, 'revoked')
if revoked then return revoked end
extend(owner, ttl)
local known = ask('HGET', details, owner)
if known then ask('HSET', details, owner, (known:gsub('^(%S+) %S+', '%1 ' .. ttl, 1))) end
tell_first()
return { 'done' }
