-- Second phase: raises the counter to the token that was agreed on, if the node is still ours. One that knows a
-- greater token has been somebody else's in between, or this arrives late: it must not speak for ours.
local owner, token, ttl, who = unpack(ARGV)
leave_queue(owner)
local ours = holds(owner) and last_token() <= tonumber(token)
if ours then
  redis.call('SET', counter, token)
  describe(owner, ttl, token, who)
end
if sweep() > 0 then tell_first() end
return { ours and 'ours' or 'gone' }
