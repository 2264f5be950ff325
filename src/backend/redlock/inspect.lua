-- What this node knows, changing nothing:
-- { 'state', value, pttl, details, whether it is revoked, last, whether the node knows the lock at all,
--   { waiter, ms left, details … } }
local value = redis.call('GET', lock)
local known = (value or redis.call('EXISTS', counter) == 1) and 1 or 0
local waiting = {}
local places = ask('ZRANGEBYSCORE', places, '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES') or {}
for i = 1, #places, 2 do
  local owner, left = places[i], string.format('%.0f', places[i + 1] - now)
  for _, part in ipairs({ owner, left, ask('HGET', details, owner) or '' }) do table.insert(waiting, part) end
end
local about, revoked = '', 0
if value then
  about = ask('HGET', details, value) or ''
  revoked = reason_in(ask('GET', notes .. value), 'revoked') and 1 or 0
end
return { 'state', value or '', redis.call('PTTL', lock), about, revoked, ask('GET', last) or '', known, waiting }
