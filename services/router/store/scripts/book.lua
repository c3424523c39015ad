-- ARGV: request id, worker id, slot, prefill, decode, expiry in Unix ms, output, owner ("" for none), its lease in ms.
-- Does nothing if the request has a reservation.
if redis.call('HEXISTS', RESERVATIONS, ARGV[1]) == 0 then
  book(ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]),
    tonumber(ARGV[7]), ARGV[8], ARGV[9])
end
return 1
