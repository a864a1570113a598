-- stats: counts of a queue, in one atomic step. Reads only.
-- KEYS   1-4 streams  5 feed  6 retry  7 waiting  8 suspended  9 held  10 dead  11 delayed  12 control  13 dlq  14 workers
--        15 lanes  then streams of further lanes
-- ARGV   1 group  2 consumer that holds retries in the pending list  3 milliseconds without a claim after which a worker does not count
--        4 declared lanes
-- Reply  {'lanes', …} | {messages, pending, waiting in the pending list, retry, suspended, held, dead, delayed, feed entries,
--         dead letters, workers, controls, unread bytes of the feed (0 without a reader), {tenant, lane, …}, {lane, backlog, …},
--         epoch ('': there is no ledger)}
local streams = declared_streams()
local group, retry_consumer, control = ARGV[1], ARGV[2], KEYS[12]
local active = numbers_in(redis.call('HGET', control, 'lanes'))
local missing = undeclared_lanes(streams, active)
if missing then return missing end

local messages, waiting, parked, backlogs = 0, 0, 0, {}
for _, lane in ipairs({ 0, unpack(active) }) do
  local backlog = backlog_of(streams, lane)
  messages = messages + backlog
  local all_pending, leased = leases_in(streams, lane, group, ''), leases_in(streams, lane, group, retry_consumer)
  backlogs[#backlogs + 1], backlogs[#backlogs + 2] = lane, backlog - (all_pending - leased)
  waiting, parked = waiting + all_pending, parked + all_pending - leased
end
local workers = redis.call('ZCOUNT', KEYS[14], '(' .. format_integer(now_ms() - tonumber(ARGV[3])), '+inf')
local reader = redis.call('HMGET', control, 'reader', 'feed_read')
local bytes = reader[1] and math.max(0, (redis.call('MEMORY', 'USAGE', KEYS[5]) or 0) - read_bytes(reader[2])) or 0
return { messages, waiting, parked, redis.call('ZCARD', KEYS[6]), redis.call('ZCARD', KEYS[8]), redis.call('ZCARD', KEYS[9]),
  redis.call('ZCARD', KEYS[10]), redis.call('ZCARD', KEYS[11]), redis.call('XLEN', KEYS[5]), redis.call('XLEN', KEYS[13]),
  workers, redis.call('HGETALL', control), bytes, redis.call('HGETALL', KEYS[15]), backlogs, EPOCH }
