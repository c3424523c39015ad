-- ARGV: record ("" only asks), time to live in ms, whether to replace another record ("1" or "0"). Returns the record that
-- holds, or nil.
local key = base .. ':pin'
local held = redis.call('GET', key)
if ARGV[1] == '' then return held end
if not held or ARGV[3] == '1' then held = ARGV[1] end
redis.call('SET', key, held, 'PX', ARGV[2])
return held
