-- Undoes what older requests of its owner took; this is the nth. Who goes on waiting has a place from here on; who
-- leaves for good has none any more. given_up: the number of the last request of ours that this node may still have
-- to get, if there is one: it must find that we do not want it any more.
local owner, n, given_up, waits, since, waited, ttl, who = unpack(ARGV)
give_up(owner, given_up)
local makes_way = first() == owner
if holds(owner) then
  -- We have taken it again since, and may hold it: this comes too late.
  if taken_by(owner) > tonumber(n) then return { 'done' } end
  let_go(owner)
  ask('DEL', turns .. owner)
  makes_way = true
end
if waits ~= '1' then
  forget(owner)
elseif not is_late(owner, n) then
  wait(owner, since, waited, ttl, who)
end
if makes_way then tell_first(owner) end
return { 'done' }
