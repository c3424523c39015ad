-- Requests of one key are still under way: their places are held for longer. One that ended meanwhile stays ended.
-- KEYS[1]: as limits.lua's KEYS[2]; ARGV: how long (ms), then the request ids
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = {}
for at = 2, #ARGV do
  held[#held + 1] = now + ARGV[1]
  held[#held + 1] = ARGV[at]
end
redis.call('ZADD', KEYS[1], 'XX', unpack(held))
redis.call('PEXPIRE', KEYS[1], ARGV[1] * 2)
return #ARGV - 1
