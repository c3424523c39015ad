-- Extends the leases of running requests of one key; requests that have ended are not added again.
-- KEYS[1]: KEYS[2] of limits.lua; ARGV: lease (ms), then the request ids
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local leases = {}
for at = 2, #ARGV do
  leases[#leases + 1] = now + ARGV[1]
  leases[#leases + 1] = ARGV[at]
end
redis.call('ZADD', KEYS[1], 'XX', unpack(leases))
redis.call('PEXPIRE', KEYS[1], ARGV[1] * 2)
return #ARGV - 1
