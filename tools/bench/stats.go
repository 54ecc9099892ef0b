package main

import (
	"fmt"
	"math"
	"slices"
)

// series are the measurements of one row on one side, in the row's unit.
type series []float64

func (s series) sorted() []float64 { return slices.Sorted(slices.Values(s)) }

// median is the middle one, or the mean of the middle two; NaN of none.
func (s series) median() float64 {
	v := s.sorted()
	n := len(v)
	if n == 0 {
		return math.NaN()
	}
	return (v[(n-1)/2] + v[n/2]) / 2
}

// min is the smallest; NaN of none.
func (s series) min() float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	return slices.Min(s)
}

// p90 is the smallest value that at least nine tenths do not exceed; NaN of none.
func (s series) p90() float64 {
	if len(s) == 0 {
		return math.NaN()
	}
	return s.sorted()[int(math.Ceil(0.9*float64(len(s))))-1]
}

// unit is what a row's numbers are.
type unit string

const (
	milliseconds unit = "ms"
	mebibytes    unit = "MiB"
	percent      unit = "%"
)

// cell writes a number with its unit to three digits, a dash for none.
func (u unit) cell(v float64) string {
	if math.IsNaN(v) {
		return "–"
	}
	return digits(v) + " " + string(u)
}

// ratio writes how many times b goes into a, a dash where that means nothing.
func ratio(a, b float64) string {
	if math.IsNaN(a) || math.IsNaN(b) || b == 0 {
		return "–"
	}
	return "× " + digits(a/b)
}

func digits(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}
