-- ARGV: worker id, session, "1" to keep its reservations, feed limit
if redis.call('HGET', worker_key(ARGV[1]), 'session') == ARGV[2] then
  feed(ARGV[4], 'down', ARGV[1], drop_worker(ARGV[1], ARGV[3] == '1'))
end
return 1
