-- ARGV: request id, worker id, slot, prefill, decode, expires ms, output, owner ("" for none), its lease
-- ms. Does nothing when the request is booked.
if redis.call('HEXISTS', RESERVATIONS, ARGV[1]) == 0 then
  book(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]),
    tonumber(ARGV[7]), ARGV[8], ARGV[9])
end
return 1
