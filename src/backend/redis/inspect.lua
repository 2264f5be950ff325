-- Everything an operator may want to know, changing nothing:
-- { now, value, pttl, last, { owner, ends, details, note … }, { owner, place ends, details … } }
local value = redis.call('GET', lock)
local present, waiting = {}, {}
if together(value) then
  local live = redis.call('ZRANGEBYSCORE', holders, '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES')
  for i = 1, #live, 2 do
    local owner = live[i]
    for _, part in ipairs({ owner, live[i + 1], ask('HGET', details, owner) or '', ask('GET', notes .. owner) or '' }) do
      table.insert(present, part)
    end
  end
elseif value then
  local ends = redis.call('PTTL', lock)
  present = { value, ends < 0 and '' or string.format('%.0f', now + ends), ask('HGET', details, value) or '', ask('GET', notes .. value) or '' }
end
for _, owner in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
  local ends = redis.call('ZSCORE', places, owner)
  if ends and tonumber(ends) > now then
    for _, part in ipairs({ owner, ends, ask('HGET', details, owner) or '' }) do
      table.insert(waiting, part)
    end
  end
end
return { string.format('%.0f', now), value or '', ask('GET', last) or '', present, waiting }
