-- Extends the lease of a holder, unless it is to let go. One that has let go holds nothing to renew.
local owner, ttl = unpack(ARGV)
settle()
local note = note_to(owner)
if not holds(owner) or lingers(owner) then
  local why = reason_in(note, 'taken')
  return why and { 'taken', why } or { 'lost', value or '' }
end
local why = reason_in(note, 'revoked')
if why then return { 'revoked', why } end
extend(owner, ttl)
return { 'held' }
