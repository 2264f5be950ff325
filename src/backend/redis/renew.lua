-- Extends the lease of a holder, unless it is to let go. One that has let go holds nothing to renew.
local owner, ttl = unpack(ARGV)
settle()
local note = note_to(owner)
if not holds(owner) or lingers(owner) then
  local why = reason_in(note, 'taken')
  if why then return { 'taken', why } end
  if together(value) then return { 'lost-to-several', value:sub(2) } end
  return value and { 'lost-to', value } or { 'lost' }
end
local why = reason_in(note, 'revoked')
if why then return { 'revoked', why } end
extend(owner, ttl)
return { 'held' }
