-- expedite: make a delayed or retrying job due now.
-- KEYS   1 record  2 delayed  3 retry  4 waiting  5 feed  6 control  7 notices
-- ARGV   1 nonce  2 feed limit  3 job id  4 the record's first line as last read  5 attempt  6 retry count  7 event  8 its data
--        9 the operator's event ('': none)  10 its data  11 tenant
-- Reply  'changed' | 'idle' (it does not wait for a time) | 'ok'
local job_id = ARGV[3]
local record = redis.call('GET', KEYS[1])
if string.match(record or '', '^[^\n]*') ~= ARGV[4] then return 'changed' end
local set
for i = 2, 4 do
  if redis.call('ZSCORE', KEYS[i], job_id) then set = KEYS[i] end
end
if not set then return 'idle' end
check_types({ KEYS[5], KEYS[7] }, {}, { KEYS[6] })

-- ZREM comes first: a full Redis allows it, and then the rest of the script.
redis.call('ZREM', set, job_id)
local now = format_integer(now_ms())
redis.call('ZADD', set, now, job_id)
local moves = { ARGV[7], job_id, '', '', ARGV[5], ARGV[6], ARGV[8], ARGV[11] }
if ARGV[9] ~= '' then
  for _, value in ipairs({ ARGV[9], job_id, '', '', 0, 0, ARGV[10], ARGV[11] }) do moves[#moves + 1] = value end
end
append_feed(KEYS[5], ARGV[2], redis.call('HGET', KEYS[6], 'reader'), ARGV[1], 'operator', now, '', moves)
notify_if_earliest(set, KEYS[7], now)
return 'ok'
