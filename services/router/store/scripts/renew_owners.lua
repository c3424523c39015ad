-- ARGV: lease ms, owners. Prolongs the leases of those that have one here, which is since their first booking.
local ends = now_ms() + ARGV[1]
for at = 2, #ARGV do redis.call('ZADD', OWNERS, 'XX', 'GT', ends, ARGV[at]) end
return 1
