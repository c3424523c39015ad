-- ARGV: worker id, epoch, rank, sequence, capacity, operations, feed limit, largest size of operations in the feed
-- Returns {outcome, last sequence applied}.
local id, epoch, rank, sequence = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local key = worker_key(id)
local known = redis.call('HMGET', key, 'epoch', 'seq:' .. rank)
local last = tonumber(known[2] or 0)
if known[1] ~= epoch then return {'stale', 0} end
if sequence <= last then return {'duplicate', last} end
if sequence > last + 1 then return {'gap', last} end
if not apply_ops(id, epoch, rank, ARGV[6], tonumber(ARGV[5])) then return {'overflow', last} end
redis.call('HSET', key, 'seq:' .. rank, ARGV[4])
if #ARGV[6] > tonumber(ARGV[8]) then
  feed(ARGV[7], 'replaced', id, epoch, 'r', rank, 's', ARGV[4])
else
  feed(ARGV[7], 'blocks', id, epoch, 'r', rank, 's', ARGV[4], 'o', ARGV[6])
end
return {'applied', sequence}
