-- Gives up our place in the queue, or the lock if we had got it without hearing of it.
local owner, unanswered = unpack(ARGV)
local value = settle()
local held_it = holds(value, owner)
if held_it then let_go(value, owner) else forget(owner) end
if unanswered == '1' then
  redis.pcall('SET', notes .. owner, 'withdrawn', 'PX', 600000)
elseif held_it then
  redis.pcall('SET', notes .. owner, 'released', 'PX', 60000)
end
wake()
tell_first()
return 'done'
