-- ARGV: request id, worker id, slot, prefill, decode, expires ms. Does nothing when the request is booked.
if redis.call('HEXISTS', RESERVATIONS, ARGV[1]) == 0 then
  book(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]))
end
return 1
