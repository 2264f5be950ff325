-- Takes the lock or a place in the queue. Asked again by the same owner it finds what was granted.
-- seen_*: what this server, or the one in its place before, told us when we last asked: the last token, and who
-- held the lock, for how long its lease was to last at least (left), and may last if it renews it (lasts).
local owner, mode, slots, ttl, waits, place, key, who, seen_token, seen_owner, seen_details, seen_left, seen_lasts =
  unpack(ARGV)
settle()
-- What the lock holds while it is ours.
local ours = mode == 'exclusive' and owner or '=' .. mode

-- Whether this owner is known to hold the lock no more.
local function has_left(owner)
  local note = note_to(owner)
  return note and (note == 'released' or note == 'gone' or note:sub(1, 9) == 'withdrawn' or told(owner, 'taken'))
end

-- Whether the server has lost what it told us: it does not know the last token any more; or nobody was granted
-- the lock since, nor did its holder let go, and yet its lease ends much earlier than we were told. A quarter of
-- its ttl is for clocks and requests that are slow; a lost renewal is more.
local function has_lost_data()
  local known, seen = last_token(), tonumber(seen_token)
  if known ~= seen or tonumber(seen_left) == 0 then return known < seen end
  if has_left(seen_owner) or lingers(seen_owner) then return false end
  local left = lease_left(seen_owner)
  return left >= 0 and left + seen_lasts / 4 < tonumber(seen_left)
end

-- The holder we saw may have renewed its lease after we looked, and may still run for all of its ttl.
if has_lost_data() then
  redis.call('SET', counter, seen_token)
  if (not value or value == seen_owner) and tonumber(seen_lasts) > 0 and not has_left(seen_owner) then
    if value then extend(seen_owner, seen_lasts) end
    redis.call('ZADD', holders, now + seen_lasts, seen_owner)
    if seen_details ~= '' then redis.call('HSET', details, seen_owner, seen_details) end
    outlast(seen_lasts, holders, details)
  end
end

local note = note_to(owner)
if note and note:sub(1, 9) == 'withdrawn' then
  return redis.error_reply('WITHDRAWN this request arrived after its owner had given up')
elseif note == 'turn' or has_left(owner) then
  redis.call('DEL', notes .. owner)
end

local function describe(token, slot)
  redis.call('HSET', details, owner, table.concat({ mode, ttl, whole(now), token, slot, who }, ' '))
end

local function free_slot()
  if mode:sub(1, 6) ~= 'slots:' then return '-' end
  local used, slot = {}, 0
  for _, other in ipairs(redis.call('ZRANGE', holders, 0, -1)) do used[detail(other, 5) or ''] = true end
  while used[tostring(slot)] do slot = slot + 1 end
  return tostring(slot)
end

local function may_hold(passed, ahead)
  for n = passed, passed + ahead - 1 do
    if mode == 'shared' and mode_of(at_rank(n)) ~= 'shared' then return false end
  end
  return fits(mode, ahead)
end

if holds(owner) then
  local token, slot = detail(owner, 4), detail(owner, 5)
  if not token then
    token, slot = next_token(), free_slot()
    redis.call('SET', counter, token)
    describe(token, slot)
  end
  if told(owner, 'revoked') then
    ttl = math.max(lease_left(owner), 0)
  else
    lease(owner, ttl)
  end
  return { 'granted', token, slot, ttl, ours }
end

if key ~= '' and redis.call('SISMEMBER', once, key) == 1 then
  forget(owner)
  wake()
  return { 'ran' }
end

local rank = redis.call('ZRANK', queue, owner)
local passed = passed_over()
local ahead = math.max((rank or redis.call('ZCARD', queue)) - passed, 0)
local agreed = ask('GET', agreed_slots)
if agreed and agreed ~= slots and redis.call('ZCARD', holders) + redis.call('ZCARD', queue) > 0 then
  return { 'other-slots', agreed }
end

if may_hold(passed, ahead) then
  local token, slot = next_token(), free_slot()
  redis.call('SET', counter, token)
  forget(owner)
  describe(token, slot)
  redis.call('SET', agreed_slots, slots)
  value = ours
  lease(owner, ttl)
  wake()
  if rank and ahead == 0 then tell_first() end
  return { 'granted', token, slot, ttl, ours }
end

if waits == '1' then
  if not rank then
    local latest = redis.call('ZRANGE', queue, -1, -1, 'WITHSCORES')[2] or 0
    redis.call('ZADD', queue, latest + 1, owner)
    describe('-', '-')
    redis.call('SET', agreed_slots, slots)
    -- By its absence we notice a loss of data, also where only others ever held the lock.
    if last_token() == 0 then redis.call('SET', counter, next_token()) end
  end
  redis.call('ZADD', places, now + place, owner)
  outlast(place, queue, places, details)
end
wake()

local everybody = redis.call('ZRANGE', holders, 0, -1)
if value and not together() and everybody[#everybody] ~= value then table.insert(everybody, value) end
local holder = everybody[#everybody] or ''

-- For how long the lease of any holder may last if it is renewed now. Nobody renews a foreign one, or what a
-- release has left behind, as far as we know.
local lasts, left = 0, 0
for _, one in ipairs(everybody) do
  local ttl, ends = tonumber(detail(one, 2) or ''), math.max(lease_left(one), 0)
  local kept_alive = ttl and not lingers(one)
  lasts = math.max(lasts, ttl or 0, kept_alive and 0 or ends)
  if kept_alive and #everybody == 1 then left = ends end
end

-- When the first in the queue can expect a lease to end by itself, and others the first to be passed over.
local again = -1
if ahead > 0 then
  local ago = told_ago(at_rank(passed))
  if ago then again = COMES_WITHIN - ago end
elseif holder ~= '' then
  again = lease_left(value == ours and everybody[1] or holder)
end
-- Several holders are vouched for together: none of them can say alone that it has let go.
local seen = #everybody > 1 and 'several' or holder
local about = redis.call('HGET', details, holder) or ''
return { 'busy', ahead, again, value or '', holder, last_token(), seen, about, left, lasts }
