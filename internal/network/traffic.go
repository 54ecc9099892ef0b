package network

import "context"

// Traffic gives the bytes that went out of each sandbox and into it since its network was
// made. It reads the counters of all uplinks at once. What hutch itself says to a guest
// is not among them: its sockets are in R, on this side of the uplink.
func (m *Manager) Traffic(context.Context) (map[string]int64, error) {
	links, err := m.uplinks()
	if err != nil {
		return nil, m.failed(err, "the counters of the sandboxes' networks cannot be read")
	}
	out := make(map[string]int64, len(links))
	for _, l := range links {
		a := l.Attrs()
		if id, ok := idOfAlias(m.cfg.Tag, a.Alias); ok && a.Statistics != nil {
			out[id] += int64(a.Statistics.RxBytes + a.Statistics.TxBytes)
		}
	}
	return out, nil
}
