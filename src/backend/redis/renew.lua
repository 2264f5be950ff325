-- Extends the lease of a holder, unless it is to let go. One that has let go holds nothing to renew.
local owner, ttl = unpack(ARGV)
settle()
if not holds(owner) or lingers(owner) then return told(owner, 'taken') or { 'lost', value or '' } end
local revoked = told(owner, 'revoked')
if revoked then return revoked end
extend(owner, ttl)
return { 'held' }
