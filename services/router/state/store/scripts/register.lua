-- ARGV: worker id, epoch (20 digits), session, ranks, card, lease in ms, feed limit, holder
-- Returns {0} if a higher epoch of the same holder is registered, else {1, rank, sequence, ...}.
local id, epoch, session, ranks, card = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key = worker_key(id)
local known, holder = unpack(redis.call('HMGET', key, 'epoch', 'holder'))
if known and (holder or '') ~= ARGV[8] then
  drop_worker(id, false)
  feed(ARGV[7], 'down', id, known)
  known = false
end
if known and known > epoch then return {0} end
local departed = redis.call('HGET', DEPARTED, id)
if departed then
  local last = cmsgpack.unpack(departed)
  if last.e ~= epoch or last.h ~= ARGV[8] then unbook_worker(id) end
  redis.call('HDEL', DEPARTED, id)
end
if known and known < epoch then drop_worker(id, false) end
redis.call('HSET', key, 'epoch', epoch, 'session', session, 'ranks', ranks, 'card', card, 'draining', '0',
  'holder', ARGV[8])
redis.call('ZADD', WORKERS, now_ms() + ARGV[6], id)
feed(ARGV[7], 'up', id, epoch, 'card', card)
local answer = {1}
for rank = 0, tonumber(ranks) - 1 do
  local sequence = redis.call('HGET', key, 'seq:' .. rank)
  if sequence then
    answer[#answer + 1] = rank
    answer[#answer + 1] = tonumber(sequence)
  end
end
return answer
