-- First phase: takes this node if nobody else has it or is before us in the queue, and says which token it
-- would have to be at least. ignores_queue: the nodes do not agree on who is first.
-- seen_*: who held this node when we last asked it, and what it said about that holder.
local owner, n, ttl, key, waits, since, waited, ignores_queue, who, seen_owner, seen_details = unpack(ARGV)
if is_late(owner, n) or taken_by(owner) > tonumber(n) then
  return redis.error_reply('WITHDRAWN this request arrived after its owner had given up')
end

-- On a node that is free: forgets those at the head of the queue that were told and did not ask in time; tells the next.
local function pass_over_the_gone()
  local other = first()
  while other and other ~= owner do
    local told_at = tonumber(ask('GET', turns .. other) or '')
    if not told_at or math.abs(now - told_at) <= COMES_WITHIN then break end
    forget(other)
    other = first()
  end
  tell_first(owner)
end

-- A node that does not know the token of that holder any more has lost its data. The holder may still run, and may
-- have renewed its lease after we looked: the node is its own again, for all of its ttl.
local seen_ttl, seen_token = seen_details:match('^%S+ (%d+) %S+ (%d+) ')
if not value and seen_token and last_token() < tonumber(seen_token) then
  redis.call('SET', lock, seen_owner, 'PX', seen_ttl)
  redis.call('SET', counter, seen_token)
  ask('HSET', details, seen_owner, seen_details)
  outlast(seen_ttl, details)
  value = seen_owner
end

if value ~= owner then
  local ahead, ask_again = sweep(), 0
  if not value and key ~= '' and redis.call('SISMEMBER', once, key) == 1 then return { 'ran' } end
  if ahead > 0 then
    if not value then pass_over_the_gone() end
    ahead = ask('ZRANK', queue, owner) or ask('ZCOUNT', queue, '-inf', '(' .. order(since, waited)) or 0
  end
  if value or (ahead > 0 and ignores_queue ~= '1') then
    ask('DEL', turns .. owner)
    if waits == '1' then
      ahead, ask_again = wait(owner, since, waited, ttl, who)
    end
    local about = value and ask('HGET', details, value) or ''
    return { 'busy', value or '', redis.call('PTTL', lock), about, ahead, ask_again }
  end
end
take(owner, n, ttl)
return { 'ours', next_token() }
