-- Takes the lock, or one node of it, away from one holder: marks it, or frees it on the spot. `run` is what becomes of its
-- run, unless its dlock is there to tell. The reason is kept for so long (ms).
local owner, token, how, reason, run, runs, keep = unpack(ARGV)
settle()
if not holds(owner) or (token ~= '' and (detail(owner, 4) or token) ~= token) then return { 'gone' } end
-- What is only held on to after a run takes nothing away from how that ended.
local ended = lingers(owner) and (ask('GET', last) or ''):find('"owner":"' .. owner .. '"', 1, true)
if how == 'now' then
  let_go(owner)
  leave_note(owner, 'taken ' .. reason, keep)
  if not ended then remember(run, runs, '') end
  wake()
  return { 'freed' }
end
if not detail(owner, 1) then return { 'foreign' } end
if lingers(owner) and not ended then remember(run, runs, '') end
redis.call('SET', notes .. owner, 'revoked ' .. reason, 'PX', whole(math.max(lease_left(owner), 1)))
return { 'marked' }
