-- ARGV: worker id, epoch, rank, sequence, capacity, operations, feed limit
-- Returns {outcome, last sequence applied}.
local id, epoch, rank, sequence = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local key = worker_key(id)
local known = redis.call('HMGET', key, 'epoch', 'seq:' .. rank)
local last = tonumber(known[2] or 0)
if known[1] ~= epoch then return {'stale', 0} end
if sequence < last then return {'duplicate', last} end
unlink_rank(id, epoch, rank)
if not apply_ops(id, epoch, rank, ARGV[6], tonumber(ARGV[5])) then return {'overflow', last} end
redis.call('HSET', key, 'seq:' .. rank, ARGV[4])
feed(ARGV[7], 'replaced', id, epoch, 'r', rank, 's', ARGV[4])
return {'applied', sequence}
