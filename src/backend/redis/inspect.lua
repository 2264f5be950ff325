-- Everything an operator may want to know, changing nothing:
-- { now, mode, last, { owner, ends, details, whether it is revoked … }, { owner, place ends, details … } }
local value = redis.call('GET', lock)
local present, waiting = {}, {}

local function is_revoked(owner)
  return reason_in(ask('GET', notes .. owner), 'revoked') and 1 or 0
end

if together(value) then
  local live = redis.call('ZRANGEBYSCORE', holders, '(' .. string.format('%.0f', now), '+inf', 'WITHSCORES')
  for i = 1, #live, 2 do
    local owner = live[i]
    for _, part in ipairs({ owner, live[i + 1], ask('HGET', details, owner) or '', is_revoked(owner) }) do
      table.insert(present, part)
    end
  end
elseif value then
  local ends = redis.call('PTTL', lock)
  ends = ends < 0 and '' or string.format('%.0f', now + ends)
  present = { value, ends, ask('HGET', details, value) or '', is_revoked(value) }
end
for _, owner in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
  local ends = redis.call('ZSCORE', places, owner)
  if ends and tonumber(ends) > now then
    for _, part in ipairs({ owner, ends, ask('HGET', details, owner) or '' }) do
      table.insert(waiting, part)
    end
  end
end
local mode = together(value) and value:sub(2) or 'exclusive'
return { string.format('%.0f', now), mode, ask('GET', last) or '', present, waiting }
