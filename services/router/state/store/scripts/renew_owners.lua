-- ARGV: lease in ms, owners. Renews the leases of the owners that have one, which starts with their first reservation.
local ends = now_ms() + ARGV[1]
for at = 2, #ARGV do redis.call('ZADD', OWNERS, 'XX', 'GT', ends, ARGV[at]) end
return 1
