#!/usr/bin/env perl
# A whole host on Perl's own modules: says the task back and seals nothing.
# Written from contracts/sidecar.md alone; the numbers in the comments are its rules.
use strict;
use warnings;
use Encode qw(decode FB_CROAK);
use JSON::PP ();
use POSIX qw(strftime);
use Time::HiRes qw(time);

my $LINE_BYTES_MAX = 16 * 1024 * 1024;
my $UUID = qr/\A[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\z/i;
my $json = JSON::PP->new->max_depth(128)->canonical->allow_bignum; # S3
my $any = JSON::PP->new->allow_nonref;
my %me = (backend => { id => 'echo:perl', backend_version => sprintf('%vd', $^V) }, capabilities => { streaming => 'native' });

binmode STDIN, ':raw';
binmode STDOUT, ':encoding(UTF-8)';
$| = 1;                                          # S1: whole and at once
$SIG{$_} = sub { exit 0 } for qw(TERM INT HUP);  # S36
$SIG{PIPE} = sub { exit 1 };                     # S37

sub say_message { print $json->encode({@_}), "\n" }

sub now {
    my $at = time;
    return strftime('%Y-%m-%dT%H:%M:%S', gmtime $at) . sprintf('.%03dZ', ($at - int $at) * 1000);
}

sub new_uuid {
    open my $random, '<:raw', '/dev/urandom' or die "no randomness: $!";
    read $random, my $bytes, 16;
    return join '-', unpack 'H8 H4 H4 H4 H12', $bytes;
}

# To Perl a number is a text; JSON's own writer can tell.
sub is_text { defined $_[0] && !ref $_[0] && $any->encode($_[0]) =~ /\A"/ }

sub fatal {
    my ($ref_id, $code, $words) = @_;
    say_message(t => 'fatal', ref_id => $ref_id, error => $words, error_code => $code);
}

sub run {
    my ($id, $order) = @{ $_[0] }{qw(id work_order)};
    my $ref_id = is_text($id) ? $id : undef;
    unless (defined $ref_id && ref $order eq 'HASH' && is_text($order->{task}) && is_text($order->{id}) && $order->{id} =~ $UUID) {
        return fatal($ref_id, 'contract_schema_violation', 'a run needs an id and an order with an id and a task'); # S18
    }
    my ($started, $started_at) = (time, now());
    my $event = sub { say_message(t => 'event', ref_id => $ref_id, event => { ts => now(), @_ }) };
    $event->(type => 'run_started', message => 'echo');
    $event->(type => 'assistant_message', text => $order->{task});
    $event->(type => 'run_completed', message => 'done');
    my %meta = (
        run_id => $ref_id =~ $UUID ? $ref_id : new_uuid(),
        work_order_id => $order->{id},
        contract_version => 'abp/v0.1',
        started_at => $started_at,
        finished_at => now(),
        duration_ms => int((time - $started) * 1000),
    );
    # S32, S33: the control plane has seen the trace and seals the receipt.
    my %rest = (usage_raw => {}, usage => {}, trace => [], artifacts => [], verification => { harness_ok => JSON::PP::true });
    say_message(t => 'final', ref_id => $ref_id, receipt => { %me, meta => \%meta, %rest, outcome => 'complete' });
}

# A run ends before the next line is read, so a cancel always comes too late and is ignored (S52).
my %answers = (run => \&run, ping => sub { say_message(t => 'pong', seq => $_[0]{seq}) });

say_message(t => 'hello', contract_version => 'abp/v0.1', %me, extensions => [ 'cancel/1', 'ping/1' ], heeds => []);
while (defined(my $line = <STDIN>)) {
    next if $line !~ /\S/;                       # S7
    my $message = eval {
        die "a line is too long\n" if length $line > $LINE_BYTES_MAX + 1; # S4
        $json->decode(decode('UTF-8', $line, FB_CROAK));
    };
    if ($@) {
        fatal(undef, 'protocol_invalid_envelope', 'unreadable line: ' . substr $@, 0, 200); # S19
    } elsif (ref $message eq 'HASH' && is_text($message->{t}) && $answers{ $message->{t} }) {
        $answers{ $message->{t} }->($message);
    }
}
