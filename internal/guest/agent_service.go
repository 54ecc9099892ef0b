package guest

import (
	"context"
	"time"

	"connectrpc.com/connect/v2"

	"github.com/hutchrun/hutch/internal/fault"
	"github.com/hutchrun/hutch/internal/guestproto"
)

// agentService answers the Agent service.
type agentService struct{ g *Guest }

var _ guestproto.AgentHandler = agentService{}

// token is the one that a call came with.
func token(ctx context.Context) string {
	info, ok := connect.CallInfoForServerContext(ctx)
	if !ok {
		return ""
	}
	return info.RequestHeader().Get(guestproto.TokenHeader)
}

func (s agentService) Init(ctx context.Context, req *guestproto.InitRequest) (*guestproto.InitResponse, error) {
	return s.g.initialise(token(ctx), req)
}

func (s agentService) Restored(ctx context.Context, req *guestproto.RestoredRequest) (*guestproto.RestoredResponse, error) {
	return s.g.takeOver(token(ctx), req)
}

func (s agentService) Ping(context.Context, *guestproto.PingRequest) (*guestproto.PingResponse, error) {
	now := time.Now()
	return &guestproto.PingResponse{
		AgentVersion:      s.g.cfg.Version,
		UptimeNanos:       int64(now.Sub(s.g.began)),
		WallClockUnixNano: now.UnixNano(),
		Held:              s.g.boot.held.Load(),
		Stopping:          s.g.shutdown.begun.Load(),
	}, nil
}

func (s agentService) Activity(context.Context, *guestproto.ActivityRequest) (*guestproto.ActivityResponse, error) {
	return s.g.activity(), nil
}

// mostProcesses is how many processes one answer lists.
const mostProcesses = 10_000

func (s agentService) Processes(context.Context, *guestproto.ProcessesRequest) (*guestproto.ProcessesResponse, error) {
	all := s.g.processes()
	listed := all[:min(len(all), mostProcesses)]
	return &guestproto.ProcessesResponse{
		Processes: s.g.describe(listed),
		Omitted:   int32(len(all) - len(listed)),
	}, nil
}

func (s agentService) Sync(ctx context.Context, _ *guestproto.SyncRequest) (*guestproto.SyncResponse, error) {
	if err := s.g.sync(ctx); err != nil {
		return nil, err
	}
	return &guestproto.SyncResponse{}, nil
}

func (s agentService) PrepareStop(ctx context.Context, _ *guestproto.PrepareStopRequest) (*guestproto.PrepareStopResponse, error) {
	if err := s.g.sync(ctx); err != nil {
		return nil, err
	}
	return &guestproto.PrepareStopResponse{}, nil
}

func (s agentService) Shutdown(ctx context.Context, req *guestproto.ShutdownRequest) (*guestproto.ShutdownResponse, error) {
	if req.GraceNanos < 0 || req.GraceNanos > int64(10*time.Minute) {
		return nil, fault.New(fault.InvalidArgument, "a grace is 0 to 10 minutes")
	}
	return s.g.shutDown(ctx, time.Duration(req.GraceNanos))
}
