"""What changes in Redis at once: the Lua functions of the Redis backend, each over the keys of one shard tag.

A call of the server from Lua costs more than the work it does, so every function reads all with one command, decides,
and writes with one command per kind of key. Nothing can fail after the first write: the server refuses a function for
want of memory at its first write or not at all, and every key has one type.

A server that is full refuses WRITE and TOUCH, and runs REWRITE and REQUEUE: blocks that are there can be picked,
marked, decided and removed, which is how room is made. No command here reads or writes more than the blocks of its
call, however many siblings they have; only FAMILIES reads those it is asked for.
"""

from __future__ import annotations

from typing import Final

from kvcm.store.redis.script import Script

__all__ = ["DROP", "FAMILIES", "REQUEUE", "RETIRED", "REWRITE", "SAMPLE", "TOUCH", "WRITE"]

RETIRED: Final = 1 << 33
"""Added to the scores of blocks without a serving location, so that those that can be evicted stand before them."""

_WRITE: Final = """
-- KEYS: access order, children, pending, usage, then the block records.
-- ARGV[1]: 8 bytes per block, the stamp that its record must have; zeros: there must be none.
-- ARGV[2]: packed {score: number to set, true to retire the block, false to leave it;
--                  due time: number to set, true to clear, false to leave;
--                  blocks that leave a parent; blocks that come to a parent: indexes;
--                  fields of usage;
--                  usage: {index, number of the field, bytes or blocks, index, ...}}.
-- ARGV[3], ARGV[4]: 8 bytes per block that leaves and per block that comes: the parent.
-- ARGV[5...]: the records to store, empty to remove.
-- Returns the turn of the shard that this call is, 0 when all blocks lost, then the indexes of blocks whose record had
-- another stamp.
local order, children, pending, usage = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local scores, dues, leaving, coming, fields, bytes = unpack(cmsgpack.unpack(ARGV[2]))
local won, lost = {}, {}

local function eight(text, n) return string.sub(text, n * 8 - 7, n * 8) end

local function call(command, key, list)
  if #list > 0 then redis.call(command, key, unpack(list)) end
end

local function compare(held)
  for i = 1, #held do
    local stamp = held[i] and string.sub(held[i], 2, 9) or '\\0\\0\\0\\0\\0\\0\\0\\0'
    if stamp == eight(ARGV[1], i) then
      won[i] = string.sub(KEYS[4 + i], -8)
    else
      lost[#lost + 1] = i
    end
  end
end

local function write(held)
  local stored, removed, forgotten = {}, {}, {}
  for i, member in pairs(won) do
    if ARGV[4 + i] ~= '' then
      stored[#stored + 1] = KEYS[4 + i]
      stored[#stored + 1] = ARGV[4 + i]
    elseif held[i] then
      removed[#removed + 1] = KEYS[4 + i]
      forgotten[#forgotten + 1] = member
    end
  end
  if #stored > 0 then redis.call('MSET', unpack(stored)) end
  if #removed > 0 then redis.call('UNLINK', unpack(removed)) end
  call('ZREM', order, forgotten)
end

local function retire(members, ordered)
  if #members == 0 then return end
  for n, score in ipairs(redis.call('ZMSCORE', order, unpack(members))) do
    score = tonumber(score)
    if score and score < 8589934592 then
      ordered[#ordered + 1] = score + 8589934592
      ordered[#ordered + 1] = members[n]
    end
  end
end

local function schedule()
  local ordered, retiring, due, done = {}, {}, {}, {}
  for i, member in pairs(won) do
    if scores[i] == true then
      retiring[#retiring + 1] = member
    elseif scores[i] then
      ordered[#ordered + 1] = scores[i]
      ordered[#ordered + 1] = member
    end
    if dues[i] == true then
      done[#done + 1] = member
    elseif dues[i] then
      due[#due + 1] = dues[i]
      due[#due + 1] = member
    end
  end
  retire(retiring, ordered)
  call('ZADD', order, ordered)
  call('ZADD', pending, due)
  call('ZREM', pending, done)
end

local function relate()
  local left, joined = {}, {}
  for n, i in ipairs(leaving) do
    if won[i] then left[#left + 1] = eight(ARGV[3], n) .. won[i] end
  end
  for n, i in ipairs(coming) do
    if won[i] then
      joined[#joined + 1] = 0
      joined[#joined + 1] = eight(ARGV[4], n) .. won[i]
    end
  end
  call('ZREM', children, left)
  call('ZADD', children, joined)
end

local function count()
  local totals = {}
  for n = 1, #bytes, 3 do
    if won[bytes[n]] then totals[bytes[n + 1]] = (totals[bytes[n + 1]] or 0) + bytes[n + 2] end
  end
  for field, total in pairs(totals) do
    if total ~= 0 then redis.call('HINCRBY', usage, fields[field], string.format('%.0f', total)) end
  end
end

local held = redis.call('MGET', unpack(KEYS, 5))
compare(held)
write(held)
schedule()
relate()
count()
if next(won) == nil then return {0, unpack(lost)} end
return {redis.call('HINCRBY', usage, '#', 1), unpack(lost)}
"""
WRITE: Final = Script(_WRITE)
REWRITE: Final = Script(_WRITE, allow_oom=True)

TOUCH: Final = Script("""
-- KEYS: access order. ARGV: unix seconds, 1 if they are set, then key and number of reads of every block read.
local members, counts = {}, {}
for i = 3, #ARGV, 2 do
  members[#members + 1] = ARGV[i]
  counts[#counts + 1] = tonumber(ARGV[i + 1])
end
local at = ARGV[2] == '1' and tonumber(ARGV[1]) or 0
local changed = {}
for n, score in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(members))) do
  score = tonumber(score)
  if score then
    local retired = score < 8589934592 and 0 or 8589934592
    local seconds = math.floor(score) - retired
    local reads = math.floor((score % 1) * 4096 + 0.5) + counts[n]
    changed[#changed + 1] = retired + math.max(seconds, at) + math.min(reads, 4095) / 4096
    changed[#changed + 1] = members[n]
  end
end
if #changed > 0 then redis.call('ZADD', KEYS[1], unpack(changed)) end
""")

_REQUEUE: Final = """
-- KEYS: access order. ARGV: unix seconds, then key and number of reads of every block.
local members, scores = {}, {}
for i = 2, #ARGV, 2 do
  members[#members + 1] = ARGV[i]
  scores[#scores + 1] = tonumber(ARGV[1]) + math.min(tonumber(ARGV[i + 1]), 4095) / 4096
end
local changed = {}
for n, score in ipairs(redis.call('ZMSCORE', KEYS[1], unpack(members))) do
  if score and tonumber(score) < 8589934592 then
    changed[#changed + 1] = scores[n]
    changed[#changed + 1] = members[n]
  end
end
if #changed > 0 then redis.call('ZADD', KEYS[1], unpack(changed)) end
"""
REQUEUE: Final = Script(_REQUEUE, allow_oom=True)

FAMILIES: Final = Script("""
-- KEYS: children. ARGV: 8 bytes per parent. Returns for each what stands of its family, one relation after the other.
local families = {}
for at = 1, #ARGV[1], 8 do
  local parent = string.sub(ARGV[1], at, at + 7)
  local first, last = '[' .. parent .. string.rep('\\0', 8), '[' .. parent .. string.rep('\\255', 8)
  families[#families + 1] = table.concat(redis.call('ZRANGEBYLEX', KEYS[1], first, last))
end
return families
""")

SAMPLE: Final = Script("""
-- KEYS: access order. ARGV: positions in it. Returns who stands there, none beyond the end.
local sample = {}
for _, position in ipairs(ARGV) do
  sample[#sample + 1] = redis.call('ZRANGE', KEYS[1], position, position)[1]
end
return sample
""")

DROP: Final = Script("""
-- KEYS: access order, children, pending, usage, then block records, which stand in the access order.
-- Returns how many blocks are left; the rest goes with the last of them.
local members = {}
for i = 5, #KEYS do members[#members + 1] = string.sub(KEYS[i], -8) end
if #members > 0 then
  redis.call('UNLINK', unpack(KEYS, 5))
  redis.call('ZREM', KEYS[1], unpack(members))
end
local left = redis.call('ZCARD', KEYS[1])
if left == 0 then redis.call('UNLINK', unpack(KEYS, 1, 4)) end
return left
""")
