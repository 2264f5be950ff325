-- What this node knows, changing nothing:
-- { value, pttl, details, note, last, whether it knows the lock at all, { waiter, ms left, details … } }
local value = redis.call('GET', lock)
local known = (value or redis.call('EXISTS', counter) == 1) and 1 or 0
local waiting = {}
local places = ask('ZRANGEBYSCORE', places, '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES') or {}
for i = 1, #places, 2 do
  local owner, left = places[i], string.format('%.0f', places[i + 1] - now)
  for _, part in ipairs({ owner, left, ask('HGET', details, owner) or '' }) do table.insert(waiting, part) end
end
local about, note = '', ''
if value then
  about, note = ask('HGET', details, value) or '', ask('GET', notes .. value) or ''
end
return { value or '', redis.call('PTTL', lock), about, note, ask('GET', last) or '', known, waiting }
