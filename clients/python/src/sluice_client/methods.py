"""The RPCs that this library calls."""

from sluice_client import wire
from sluice_client.connection import Method

_ROUTER = "/sluice.v1.Router/"
ROUTE = Method(_ROUTER + "RouteQuery", wire.RouteQueryRequest, wire.RouteQueryResponse)
ADD = Method(_ROUTER + "AddRequest", wire.AddRequestRequest, wire.AddRequestResponse)
MARK = Method(_ROUTER + "MarkPrefillComplete", wire.MarkPrefillCompleteRequest, wire.MarkPrefillCompleteResponse)
FREE = Method(_ROUTER + "FreeRequest", wire.FreeRequestRequest, wire.FreeRequestResponse)
PROGRESS = Method(_ROUTER + "ReportProgress", wire.ReportProgressRequest, wire.ReportProgressResponse)
DECISIONS = Method(_ROUTER + "GetDecisions", wire.GetDecisionsRequest, wire.GetDecisionsResponse)
LIST = Method(_ROUTER + "ListWorkers", wire.ListWorkersRequest, wire.ListWorkersResponse)
WATCH = Method(_ROUTER + "WatchWorkers", wire.WatchWorkersRequest, wire.WorkerChange)
QUEUES = Method(_ROUTER + "GetQueues", wire.GetQueuesRequest, wire.GetQueuesResponse)
WATCH_QUEUES = Method(_ROUTER + "WatchQueues", wire.GetQueuesRequest, wire.GetQueuesResponse)
LOADS = Method(_ROUTER + "GetLoads", wire.GetLoadsRequest, wire.GetLoadsResponse)
OVERLAPS = Method(_ROUTER + "GetOverlaps", wire.GetOverlapsRequest, wire.GetOverlapsResponse)
DUMP = Method(_ROUTER + "DumpIndex", wire.DumpIndexRequest, wire.IndexDump)

_WORKER = "/sluice.v1.Worker/"
GENERATE = Method(_WORKER + "Generate", wire.GenerateRequest, wire.GenerateDelta)
ABORT = Method(_WORKER + "Abort", wire.AbortRequest, wire.AbortResponse)
INFO = Method(_WORKER + "GetInfo", wire.GetInfoRequest, wire.GetInfoResponse)
