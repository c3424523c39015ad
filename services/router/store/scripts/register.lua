-- ARGV: worker id, epoch (20 digits), session, ranks, card, lease ms, feed limit
-- Returns {0} when a higher epoch is registered, else {1, rank, sequence, ...}.
local id, epoch, session, ranks, card = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local key = worker_key(id)
local known = redis.call('HGET', key, 'epoch')
if known and known > epoch then return {0} end
if known and known < epoch then drop_worker(id, false) end
redis.call('HSET', key, 'epoch', epoch, 'session', session, 'ranks', ranks, 'card', card, 'draining', '0')
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
