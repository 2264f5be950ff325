-- Takes the lock or a place in the queue. Asked again by the same owner it finds what was granted.
-- before_*: whom we last saw hold it, with which token and for how much longer.
local owner, mode, wide, ttl, waits, place, key, who, before_owner, before_token, before_left = unpack(ARGV)
local value = settle()

-- A token that this server has not given out: it has lost its data, and that holder may still run.
if tonumber(before_token) > last_token() then
  redis.call('SET', counter, before_token)
  if not value and tonumber(before_left) > 0 then
    redis.call('ZADD', holders, now + before_left, before_owner)
    outlast(before_left, holders)
  end
end

local note = ask('GET', notes .. owner)
if note and note:sub(1, 9) == 'withdrawn' then
  return redis.error_reply('WITHDRAWN this request arrived after its owner had given up')
elseif note == 'turn' or taken(note) then
  redis.call('DEL', notes .. owner)
end

local function describe(token, slot)
  redis.call('HSET', details, owner, table.concat({ mode, ttl, string.format('%.0f', now), token, slot, who }, ' '))
end

local function next_token()
  local micros = time[1] * 1000000 + time[2]
  local token = string.format('%.0f', math.max(last_token() + 1, micros))
  redis.call('SET', counter, token)
  return token
end

local function free_slot()
  if mode:sub(1, 6) ~= 'slots:' then return '-' end
  local used, slot = {}, 0
  for _, other in ipairs(redis.call('ZRANGE', holders, 0, -1)) do used[detail(other, 5) or ''] = true end
  while used[tostring(slot)] do slot = slot + 1 end
  return tostring(slot)
end

-- The rule of `lock::may_hold`, on holders and the waiters before us.
local function may_hold(ahead)
  if bereft(value) or (value and value ~= '=' .. mode) then return false end
  if mode == 'exclusive' then return ahead == 0 end
  if mode ~= 'shared' then return redis.call('ZCARD', holders) + ahead < tonumber(wide) end
  if ahead > 0 then
    for _, other in ipairs(redis.call('ZRANGE', queue, 0, ahead - 1)) do
      if mode_of(other) ~= 'shared' then return false end
    end
  end
  return true
end

if holds(value, owner) then
  local token, slot = detail(owner, 4), detail(owner, 5)
  if not token then
    token, slot = next_token(), free_slot()
    describe(token, slot)
  end
  if note and note:sub(1, 8) == 'revoked ' then
    return { 'granted', token, slot, math.max(redis.call('ZSCORE', holders, owner) - now, 0) }
  end
  lease(value, owner, ttl)
  return { 'granted', token, slot, ttl }
end

if key ~= '' and redis.call('SISMEMBER', once, key) == 1 then
  forget(owner)
  wake()
  return { 'ran' }
end

local rank = redis.call('ZRANK', queue, owner)
local ahead = rank or redis.call('ZCARD', queue)
local agreed = ask('GET', width)
if agreed and agreed ~= wide and redis.call('ZCARD', holders) + redis.call('ZCARD', queue) > 0 then
  return { 'terms', agreed }
end

if may_hold(ahead) then
  local slot, token = free_slot(), next_token()
  forget(owner)
  describe(token, slot)
  redis.call('SET', width, wide)
  if mode == 'exclusive' then lease(owner, owner, ttl) else lease('=' .. mode, owner, ttl) end
  wake()
  if rank == 0 then tell_first() end
  return { 'granted', token, slot, ttl }
end

if waits == '1' then
  if not rank then
    local latest = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')[2] or 0
    redis.call('ZADD', queue, latest + 1, owner)
    describe('-', '-')
    redis.call('SET', width, wide)
  end
  redis.call('ZADD', places, now + place, owner)
  outlast(place, queue, places, details)
end
wake()

-- When the first in the queue can expect a lease to end by itself, and the second the first's place.
local again = -1
local soonest = redis.call('ZRANGE', holders, 0, 0, 'WITHSCORES')
local latest = redis.call('ZRANGE', holders, -1, -1, 'WITHSCORES')
local left = math.max(redis.call('PTTL', lock), (latest[2] or now) - now)
if ahead == 0 then
  again = left
  if value == '=' .. mode and soonest[2] then again = soonest[2] - now end
elseif ahead == 1 then
  again = (redis.call('ZSCORE', places, redis.call('ZRANGE', queue, 0, 0)[1]) or now) - now
end
local holder = latest[1] or ''
if value and not together(value) then holder = value end
return { 'busy', ahead, again, value or '', holder, redis.call('HGET', details, holder) or '', left }
