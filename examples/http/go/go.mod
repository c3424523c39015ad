module sluice.example/scheduler

go 1.22
