-- First phase: takes this node if nobody else has it, and says which token it would have to be at least.
local owner, n, ttl, key, waits, place, who = unpack(ARGV)
if is_late(owner, n) then
  return redis.error_reply('WITHDRAWN this request arrived after its owner had given up')
end
local value = redis.call('GET', lock)
if value and value ~= owner then
  if waits == '1' then
    ask('ZADD', places, now + place, owner)
    if ask('HEXISTS', details, owner) == 0 then describe(owner, ttl, '-', who) end
    sweep(value)
  end
  return { 'theirs', value, redis.call('PTTL', lock), ask('HGET', details, value) or '' }
end
if not value and key ~= '' and redis.call('SISMEMBER', once, key) == 1 then
  return { 'ran' }
end
redis.call('SET', lock, owner, 'PX', ttl)
local micros = time[1] * 1000000 + time[2]
return { 'ours', string.format('%.0f', math.max(highest_token() + 1, micros)) }
