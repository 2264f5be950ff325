-- Everything an operator may want to know, of a single Redis or of one node, changing nothing. Times are in ms from now.
-- { 'state', mode, last, the last token or nothing if the lock is not known at all, { owner, its lease, details, whether it is revoked … },
--   { owner, its place, details … }, { a run before the last one, or "vanished DETAILS" … }, when one last succeeded }
local present, waiting = {}, {}

local function tell(list, owner, left, ...)
  for _, part in ipairs({ owner, whole(left), ask('HGET', details, owner) or '', ... }) do table.insert(list, part) end
end

local function tell_holder(owner, left)
  tell(present, owner, left, told(owner, 'revoked') and 1 or 0)
end

if together() then
  local live = redis.call('ZRANGEBYSCORE', holders, '(' .. whole(now), '+inf', 'WITHSCORES')
  for i = 1, #live, 2 do tell_holder(live[i], live[i + 1] - now) end
elseif value then
  tell_holder(value, redis.call('PTTL', lock))
end
for _, owner in ipairs(ask('ZRANGE', queue, 0, -1) or {}) do
  local ends = tonumber(ask('ZSCORE', places, owner) or 0)
  if ends > now then tell(waiting, owner, ends - now) end
end
local runs = ask('LRANGE', earlier, 0, -1) or {}
for _, owner in ipairs(ask('HKEYS', details) or {}) do
  local run = owner ~= value and lease_left(owner) == 0 and not lingers(owner) and vanished_run(owner)
  if run then table.insert(runs, run) end
end
local mode = together() and value:sub(2) or 'exclusive'
local known = (value or redis.call('EXISTS', counter) == 1) and whole(last_token()) or ''
return { 'state', mode, ask('GET', last) or '', known, present, waiting, runs, ask('GET', success) or '' }
