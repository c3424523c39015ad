-- ARGV: replica, priority and deadline of the first request in its queue ("" and "": empty), lease in ms.
-- Returns the number of other replicas with a queue.
if ARGV[2] == '' then
  redis.call('HDEL', QUEUES, ARGV[1])
  return 0
end
redis.call('HSET', QUEUES, ARGV[1], struct.pack('<ddd', now_ms() + ARGV[4], tonumber(ARGV[2]), tonumber(ARGV[3])))
redis.call('PEXPIRE', QUEUES, 10 * ARGV[4])
local count = count_queues(ARGV[1], 0, 0)
return count
