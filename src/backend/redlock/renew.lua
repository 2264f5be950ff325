-- Extends our lease on this node. A node that came back empty is taken again, or a lock that is renewed
-- for long would lose its majority to restarts; it counts only from the next renewal on, since somebody
-- may have held it in between. One that an operator has taken away is not.
local owner, n, token, ttl, who = unpack(ARGV)
if holds(owner) and not lingers(owner) then
  local revoked = told(owner, 'revoked')
  if revoked then return revoked end
  extend(owner, ttl)
  redis.pcall('SET', taken, taken_as(owner, n))
  return { 'ours' }
end
local freed = told(owner, 'taken')
if freed then return freed end
if not value and not is_late(owner, n) and last_token() <= tonumber(token) then
  take(owner, n, ttl)
  redis.call('SET', counter, token)
  leave_queue(owner)
  describe(owner, ttl, token, who)
end
return { 'gone', value or '' }
