-- ARGV: replica, priority and deadline of the first request in its queue and the ms it has waited ("" each: empty), lease
-- in ms.
-- Returns the number of other replicas with a queue.
if ARGV[2] == '' then
  redis.call('HDEL', QUEUES, ARGV[1])
  return 0
end
local now = now_ms()
redis.call('HSET', QUEUES, ARGV[1],
  struct.pack('<dddd', now + ARGV[5], tonumber(ARGV[2]), tonumber(ARGV[3]), now - ARGV[4]))
redis.call('PEXPIRE', QUEUES, 10 * ARGV[5])
local count = count_queues(ARGV[1], 0, 0, 0)
return count
