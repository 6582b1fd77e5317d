module backplane/hosts

go 1.22

require backplane/host v0.0.0

replace backplane/host => ../../contracts/kits/go
