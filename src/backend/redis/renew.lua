-- Extends the lease of a holder, unless it is to let go. One that has let go holds nothing to renew.
local owner, ttl = unpack(ARGV)
local value = settle()
local note = ask('GET', notes .. owner)
if not holds(value, owner) or redis.call('SISMEMBER', lingering, owner) == 1 then
  if taken(note) then return { 'taken', taken(note) } end
  if together(value) then return { 'lost-to-several', value:sub(2) } end
  return value and { 'lost-to', value } or { 'lost' }
end
if note and note:sub(1, 8) == 'revoked ' then
  return { 'revoked', note:sub(9) }
end
extend(value, owner, ttl)
return { 'held' }
