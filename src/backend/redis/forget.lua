-- Removes what is on record of a lock, or of one node of it, but for the counter of its tokens; with a key only that.
local key = ARGV[1]
if key ~= '' then return { redis.call('SREM', once, key) == 1 and 'done' or 'nothing' } end
settle()
if value or (ask('ZCARD', holders) or 0) + (ask('ZCARD', queue) or 0) > 0 then return { 'in-use' } end
return { redis.call('DEL', last, once, earlier, success, details) > 0 and 'done' or 'nothing' }
