-- Second phase: raises the counter to the token that was agreed on, if the node is still ours.
local owner, token, ttl, who = unpack(ARGV)
local value = redis.call('GET', lock)
leave_queue(owner)
if value == owner then
  if highest_token() < tonumber(token) then
    redis.call('SET', counter, token)
  end
  describe(owner, ttl, token, who)
end
if sweep(value) > 0 then tell_first() end
return { value == owner and 'ours' or 'gone' }
