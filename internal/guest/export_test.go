package guest

// RunInit is runInit, for a test that is PID 1 of a namespace.
var RunInit = runInit
