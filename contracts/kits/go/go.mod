module backplane/host

go 1.22
